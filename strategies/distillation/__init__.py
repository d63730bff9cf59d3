"""The pieces that methods are made of: plain torch, no settings, no files."""
