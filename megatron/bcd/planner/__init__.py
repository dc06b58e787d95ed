"""Estimates of a run before it starts: memory per rank, iteration time, throughput, days, cost (docs/planner.md).

`tables` reads the data files, `recipe` describes one run, `memory` and `step_time` compute what it needs, `estimate`
combines both, `search` finds the cheapest layout, `placement` chooses the number of GPUs, `command` builds the command
line. `fit` and `paper` compare the formulas with the paper's tables. Pure arithmetic: no torch.
"""
