"""The report of a finished run: scores, tables, plots and the model card."""
