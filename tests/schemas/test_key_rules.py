"""Keys are valid at the right moments of a policy, to the edges of a period."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vantage.schemas.key_rules import milliseconds_of
from vantage.schemas.loading import plain_yaml
from vantage.schemas.loading.field_errors import validated
from vantage.schemas.publish_policy import PublishPolicy
from vantage.signing.key_validity import KeyValidity

KEY, STATEMENT = "ab" * 32, "cd" * 32


def problems(entry: str) -> list[str]:
    """Return what is wrong with a policy that has this entry for a key."""
    document = plain_yaml.read(plain_yaml.decode(f"models: {{}}\nkeys: {{{KEY}: {entry}}}".encode()))
    return [str(each) for each in validated(PublishPolicy, document.value).problems]


def validity(entry: str) -> KeyValidity:
    assert problems(entry) == []
    policy = validated(PublishPolicy, plain_yaml.read(f"models: {{}}\nkeys: {{{KEY}: {entry}}}").value)
    assert policy.value is not None
    return KeyValidity(policy.value.keys)


def is_valid(rules: KeyValidity, milliseconds: int) -> bool:
    return rules.problem(KEY, statement=STATEMENT, signed_at=milliseconds) is None


@given(
    st.datetimes(min_value=datetime(2000, 1, 2), max_value=datetime(9999, 12, 30)),
    st.integers(min_value=-14 * 60, max_value=14 * 60),
)
def test_a_time_with_an_offset_is_that_moment(local: datetime, minutes: int) -> None:
    zoned = local.replace(microsecond=0, tzinfo=timezone(timedelta(minutes=minutes)))
    oracle = (zoned - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    assert milliseconds_of(zoned.isoformat()) == oracle


def test_the_days_of_a_period_count_wholly() -> None:
    rules = validity("{valid_from: 2026-03-01, valid_until: 2026-03-01}")
    begin = 1_772_323_200_000  # date -u -d 2026-03-01 +%s
    inside = {begin - 1: False, begin: True, begin + 86_399_999: True, begin + 86_400_000: False}
    assert {when: is_valid(rules, when) for when in inside} == inside


def test_a_period_of_times_ends_at_them() -> None:
    rules = validity("{valid_from: 2026-03-01T01:00:00+01:00, valid_until: 2026-03-01T00:00:10Z}")
    begin = 1_772_323_200_000
    inside = {begin - 1: False, begin: True, begin + 10_000: True, begin + 10_001: False}
    assert {when: is_valid(rules, when) for when in inside} == inside


def test_a_revoked_key_counts_for_no_time_and_for_listed_statements_alone() -> None:
    rules = validity(f"{{revoked: {{at: 2026-03-01, reason: lost, accepted_statements: [{'ef' * 32}]}}}}")
    for when in (0, 1_772_323_200_000, 4_000_000_000_000, None):
        found = rules.problem(KEY, statement=STATEMENT, signed_at=when)
        assert found is not None
        assert found.why == "revoked"
        assert STATEMENT in found.detail
        assert rules.problem(KEY, statement="ef" * 32, signed_at=when) is None
    assert rules.problem("12" * 32, statement=STATEMENT, signed_at=None) is None, "another key"


def test_without_a_time_the_key_has_to_be_valid_now() -> None:
    for entry, holds in (("{valid_until: 2999-01-01}", True), ("{valid_until: 2001-01-01}", False)):
        assert (validity(entry).problem(KEY, statement=STATEMENT, signed_at=None) is None) is holds


@pytest.mark.parametrize(
    "entry, said",
    [
        ("{}", "none of valid_from, valid_until and revoked is there; give one, or leave the key out"),
        ("{valid_from: 2026}", "valid_from: 2026 must be text; put quotes around it"),
        (
            "{valid_until: 2026-02-30}",
            "'2026-02-30' is no time from the year 2000 to 9999; write a day of UTC",
        ),
        ("{valid_until: 2026-02-03T10:00:00}", "is no time from the year 2000 to 9999"),
        ("{valid_until: 1999-12-31}", "is no time from the year 2000 to 9999"),
        ("{valid_until: ٢٠٢٦-01-01}", "is no time from the year 2000 to 9999"),
        ("{valid_from: 2026-02-02, valid_until: 2026-02-01}", "is not before valid_until=2026-02-01"),
        ("{revoked: {at: 2026-01-01}}", "revoked.reason: is required"),
        ("{revoked: {at: 2026-01-01, reason: ' '}}", "a reason has 0 characters; give 1 to 2,000"),
        (
            "{revoked: {at: 2026-01-01, reason: x, accepted_statements: [AB]}}",
            "'AB' is no sha256 of a statement",
        ),
        ("{expires: 2026-01-01}", "expires"),
        ("[]", "must be a mapping"),
    ],
)
def test_what_is_no_rule_is_refused_by_name(entry: str, said: str) -> None:
    found = problems(entry)
    assert found
    assert said in " ".join(found)
    assert all(f"keys.{KEY}" in each for each in found)
