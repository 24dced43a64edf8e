"""Commands on runs: record, audit, dispute, calibrate, compare, report."""
