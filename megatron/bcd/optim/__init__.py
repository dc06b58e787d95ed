"""The active block's optimizer: built at the start of a phase, freed at its end; what is kept between phases."""
