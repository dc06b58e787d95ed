"""Estimates of a run before it starts: memory per rank, iteration time, throughput, days, cost (docs/planner.md).

`tables` reads the data files, `recipe` describes one run, `memory` and `step_time` compute what it needs, `estimate`
combines both; `search` chooses among recipes, `command` builds the command line. `measured` has what the studies
found. `paper` compares the formulas with the paper's tables. `state` and `activations` know no recipe: `run_state` asks
them for the trainer too, for bytes of model state and `--recompute auto`. Pure arithmetic: no torch.
"""
