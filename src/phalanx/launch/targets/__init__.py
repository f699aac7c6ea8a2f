"""Launch targets: hosts by SSH, queues and clouds, one file each."""
