"""Training jobs that come with the package and that a recorded run can name."""
