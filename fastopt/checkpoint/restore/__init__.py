"""What a checkpoint says of an updater, and how it is checked and restored."""
