"""The format of checkpoints: files, containers of arrays, and trees of values in them."""
