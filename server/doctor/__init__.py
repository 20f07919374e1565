"""`peraxis doctor` without a server: whether this machine could run one, with which base and registry."""
