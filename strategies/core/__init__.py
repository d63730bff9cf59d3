"""The foundation, which imports no sibling folder: errors, options, seeds, memory, protocols, ``--offline``."""
