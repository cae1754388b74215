"""Files of MXNet and state_dicts of torch."""
