"""The ledger: append-only, run-length coded, one relation, versioned JSON."""

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dphero.accounting import AdaptiveGaussian, Budget, Gaussian, Ledger, PoissonGaussian, ShuffledGaussian

POISSON = PoissonGaussian(0.01, 1.0)
GAUSSIAN = Gaussian(2.0)

multipliers = st.floats(0.01, 100)
events = st.one_of(
    st.builds(Gaussian, multipliers),
    st.builds(PoissonGaussian, st.floats(1e-6, 1), multipliers),
    st.builds(AdaptiveGaussian, st.floats(1e-6, 1), st.floats(0, 100)),
)


def test_equal_events_in_a_row_share_a_run():
    ledger = Ledger()
    for event, count in [(POISSON, 1), (POISSON, 4), (GAUSSIAN, 1), (POISSON, 2)]:
        ledger.record(event, count)
    assert list(ledger) == [(POISSON, 5), (GAUSSIAN, 1), (POISSON, 2)]
    assert ledger.run_count == 3
    assert ledger.steps == 8
    assert ledger.counts == {POISSON: 7, GAUSSIAN: 1}
    assert list(ledger.runs(start=1)) == [(GAUSSIAN, 1), (POISSON, 2)]


def test_an_empty_ledger_has_no_steps_and_no_relation():
    ledger = Ledger()
    ledger.record(POISSON, 0)
    assert (ledger.steps, ledger.relation, list(ledger)) == (0, None, [])


def test_mixing_relations_is_refused_when_recorded():
    ledger = Ledger()
    ledger.record(POISSON)
    with pytest.raises(ValueError, match="'zero_out', the ledger's is 'add_or_remove'"):
        ledger.record(ShuffledGaussian(1.0, 0))
    assert list(ledger) == [(POISSON, 1)]


@pytest.mark.parametrize("count", [-1, 1.0, True, "3", None])
def test_count_must_be_a_whole_number(count):
    with pytest.raises(ValueError, match="count must be a whole number"):
        Ledger().record(POISSON, count)


def test_only_events_are_recorded():
    with pytest.raises(ValueError, match="a ledger records events"):
        Ledger().record("poisson")


def test_what_is_lent_out_cannot_change_the_ledger():
    ledger = Ledger()
    ledger.record(POISSON)
    with pytest.raises(TypeError):
        ledger.counts[GAUSSIAN] = 1


def test_copies_go_their_own_way():
    ledger = Ledger()
    ledger.record(POISSON, 3)
    longer = ledger.with_event(GAUSSIAN, 2)
    copy = ledger.copy()
    assert copy == ledger
    ledger.record(POISSON)
    assert list(longer) == [(POISSON, 3), (GAUSSIAN, 2)]
    assert copy.steps == 3 and copy.counts == {POISSON: 3}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_ledgers_and_budgets_can_be_copied_and_pickled(duplicate):
    ledger, budget = Ledger(), Budget(5.0, 1e-5, "filter")
    budget.check(ledger, AdaptiveGaussian(0.1, 4.0))
    ledger.record(AdaptiveGaussian(0.1, 4.0), 3)
    budget.check(ledger, AdaptiveGaussian(0.1, 5.0))
    assert duplicate(ledger) == ledger
    duplicate(budget).check(duplicate(ledger), AdaptiveGaussian(0.1, 5.0))


def test_a_shuffled_epoch_is_charged_once_at_its_least_noise():
    ledger = Ledger()
    ledger.record(ShuffledGaussian(8.0, 0), 10)
    ledger.record(ShuffledGaussian(4.0, 0), 1)
    ledger.record(ShuffledGaussian(8.0, 1), 10)
    ledger.record(ShuffledGaussian(8.0, 2), 10)
    charges = {event.noise_multiplier: count for event, count in ledger.charges().items()}
    assert charges == {4.0: 1, 8.0: 2}
    assert ledger.steps == 31


def test_an_epoch_cannot_be_reopened():
    ledger = Ledger()
    ledger.record(ShuffledGaussian(8.0, 1))
    with pytest.raises(ValueError, match="epoch 0 is recorded after epoch 1"):
        ledger.record(ShuffledGaussian(8.0, 0))


@given(st.lists(st.tuples(events, st.integers(1, 1000)), max_size=8))
def test_json_round_trip(entries):
    ledger = Ledger()
    for event, count in entries:
        ledger.record(event, count)
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger
    assert again.steps == ledger.steps and again.counts == ledger.counts


def test_json_is_versioned():
    ledger = Ledger()
    ledger.record(POISSON, 5)
    assert json.loads(ledger.to_json()) == {
        "version": 1,
        "events": [{"kind": "poisson_gaussian", "sample_rate": 0.01, "noise_multiplier": 1.0, "count": 5}],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "version"),
        ('{"events": []}', "version None is unknown"),
        ('{"version": 2, "events": []}', "version 2 is unknown, this dphero reads version 1"),
        ('{"version": true, "events": []}', "version True is unknown"),
        ('{"version": 1, "events": [], "events": []}', "there twice"),
        ('{"version": 1, "events": [{"kind": "gaussian", "noise_multiplier": 1, "count": 9, "count": 1}]}', "twice"),
        (
            f'{{"version": 1, "events": [{{"kind": "gaussian", "noise_multiplier": 1{"0" * 400}, "count": 1}}]}}',
            "number",
        ),
        (None, "not JSON"),
        ('{"version": 1}', "exactly 'version' and a list 'events'"),
        ('{"version": 1, "events": {}}', "exactly 'version' and a list 'events'"),
        ('{"version": 1, "events": [3]}', "'kind' and 'count'"),
        ('{"version": 1, "events": [{"kind": "laplace", "count": 1}]}', "unknown event kind 'laplace'"),
        ('{"version": 1, "events": [{"kind": "gaussian", "noise_multiplier": 1, "count": 0}]}', "count"),
        ('{"version": 1, "events": [{"kind": "gaussian", "noise_multiplier": -1, "count": 1}]}', "above 0"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Ledger.from_json(text)


def test_a_ledger_knows_what_it_may_have_grown_from():
    first, second = PoissonGaussian(0.01, 1.0), PoissonGaussian(0.01, 2.0)
    ledger = Ledger().with_event(first, 3).with_event(second, 2)
    for earlier in (Ledger(), Ledger().with_event(first, 2), Ledger().with_event(first, 3), ledger.copy()):
        assert ledger.begins_with(earlier)
    other = Ledger().with_event(first, 2).with_event(second, 2)
    for later in (Ledger().with_event(second), other, ledger.with_event(second), ledger.with_event(first)):
        assert not ledger.begins_with(later)
    assert not Ledger().begins_with(ledger)
