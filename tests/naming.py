"""Names of tests that are the same in every process."""


def name_of(value: object) -> str:
    """A value as it prints; a function by its name, since it prints its address; a set in order."""
    if isinstance(value, set | frozenset):
        return str(sorted(value, key=str))
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) and " at 0x" in str(value) else str(value)
