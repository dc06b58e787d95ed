"""The optimizer of the active block: built at the start of a phase and freed at its end."""
