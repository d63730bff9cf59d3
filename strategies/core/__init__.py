"""The foundation of every other folder: errors, options, seeds, memory, the offline guard. Imports no other folder."""
