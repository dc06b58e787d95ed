"""The pipeline schedule as data (plan, build, cut, simulate: pure), and its execution (schedule, execute, p2p)."""
