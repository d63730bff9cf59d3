"""The frozen uploads as one teacher: an ensemble in this process or in shards, its copies, averages and features."""
