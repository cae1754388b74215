"""From an update call to kernel launches: validation, records, update counts, hyper-parameters."""
