"""Class names for label tables of tests that are about something else."""


def names(num_classes: int) -> tuple[str, ...]:
    return tuple(f"class-{number}" for number in range(num_classes))
