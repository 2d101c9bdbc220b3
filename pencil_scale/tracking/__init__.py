"""What a run reports to people and to MLflow."""
