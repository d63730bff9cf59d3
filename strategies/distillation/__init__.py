"""The building blocks of methods: plain torch, without settings or files."""
