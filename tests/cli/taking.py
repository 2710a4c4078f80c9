"""Profiles by the command line, and what they count."""

from recollect._core.calls import Category
from recollect._core.profiles import Profile
from tests.cli.conftest import Invoke


def take(invoke: Invoke, *args: str) -> Profile:
    done = invoke("profile", *args[:1], "--json", "-", *args[1:])
    assert done.code == 0, done.err
    return Profile.from_json(done.out)


def held(profile: Profile, category: Category) -> int:
    return sum(storage.bytes for storage in profile.storages if storage.category is category)
