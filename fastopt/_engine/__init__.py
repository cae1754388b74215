"""From an update call to kernel launches: validation, plans, update counts, hyper-parameters."""
