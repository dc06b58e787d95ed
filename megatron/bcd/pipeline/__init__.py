"""The pipeline schedule as data (plan, build, simulate: pure), and its execution (schedule, execute, p2p)."""
