"""What a run tells people and MLflow."""
