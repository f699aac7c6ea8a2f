"""Launch targets: hosts by SSH, Slurm, Kubernetes, Ray, SageMaker."""
