"""Estimate a run before it starts: memory per rank, iteration time, throughput, days, cost (docs/planner.md).

`tables` reads the data files. A `recipe` is a RunConfig on a cluster. `memory` and `step_time` compute what it needs,
`estimate` combines both, `search` chooses among recipes, and `command` writes the command line. `measured` has the
results of the studies. `run_state`, `state` and `activations` read a RunConfig alone: the trainer uses them too, for
model state and --recompute auto. Pure arithmetic: no torch.
"""
