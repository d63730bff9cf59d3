"""Merge trained models without Flower: from modules, state dicts or files to one result."""
