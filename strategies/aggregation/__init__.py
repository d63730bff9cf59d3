"""Aggregators of an ensemble's logits, and how they are trained: everything but torch-only forms is numpy alone."""
