"""A cache of its own for every test, the small data sets, and no client on the path unless a test puts one there."""

import pytest

from tests.data import small


@pytest.fixture
def cache(tmp_path, monkeypatch):
    place = tmp_path / "cache"
    monkeypatch.setenv("DPHERO_DATA", str(place))
    return place


@pytest.fixture
def programs(tmp_path, monkeypatch):
    place = tmp_path / "programs"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place))
    return place


@pytest.fixture
def sets(monkeypatch, cache, programs):
    return small.use(monkeypatch.setitem, monkeypatch.setattr)
