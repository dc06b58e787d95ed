"""The bill before the run: memory per rank, time of an iteration, tokens per second, days, money (design, section 9).

`tables` reads the data files, `recipe` is one run as the planner knows it, `memory` and `seconds` say what it needs,
`plan` puts both together, `search` looks for the cheapest layout, `placement` says where a recipe runs, `command` is
the command line; `fit` and `paper` hold it against the paper's tables. All of it is arithmetic: pure.
"""
