"""The frozen uploads as one teacher: an ensemble here or in shards, its copies, its averages, its features."""
