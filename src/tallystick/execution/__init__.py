"""The one training step that all parties share: sites, recording, following, replay."""
