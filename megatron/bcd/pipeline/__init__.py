"""The pipeline schedule as data (actions, build, validate, simulate, render: pure), and its execution (executor, p2p,
schedule)."""
