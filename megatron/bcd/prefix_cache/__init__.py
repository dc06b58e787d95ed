"""Pre-inference (arXiv 2506.12037, section 3.2.2): cache the input of the first active layer on disk, by sample.

`controller` decides whether a phase uses a cache, fills it and reads from it. `store` is the file.
"""
