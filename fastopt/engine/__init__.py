"""How a call becomes kernel launches: checks, plans, counts and hyper-parameters of a step."""
