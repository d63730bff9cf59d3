"""What every other room stands on: errors, options, seeds, memory, the offline guard. Imports no other room."""
