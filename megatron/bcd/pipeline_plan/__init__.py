"""The pipeline schedule as data: what every stage does in one iteration, checked, drawn and timed. Pure.

`plan` builds it, `check` proves it, `timing` says how long it takes, `grid` draws it; `pipeline` executes it.
"""
