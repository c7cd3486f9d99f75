"""Tags of the file that a dataset was prepared from, among the dataset inputs of its run."""


def source_tags(source_sha256: str) -> dict[str, str]:
    """What the run's page shows of it."""
    return {"mlflow.data.context": "source", "vantage.digest": source_sha256}
