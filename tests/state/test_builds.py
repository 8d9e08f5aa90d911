"""What a replacement is compared with: its predecessor, by way of a peer."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.state.builds import differing, expected

SIGNATURES = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["1", "2", "3"]))


@given(st.lists(SIGNATURES, min_size=2, max_size=4))
def test_every_rank_is_expected_to_be_as_it_was(ranks: list[dict[str, str]]) -> None:
    own = [differing(each, ranks) for each in ranks]
    for rank, signature in enumerate(ranks):
        for peer, of_peer in enumerate(ranks):
            assert expected(of_peer, own[peer], own[rank]) == signature


def test_what_a_peer_has_changed_since_is_expected() -> None:
    begun = [{"a": "1", "b": "1"}, {"a": "2", "b": "1"}]
    own = [differing(each, begun) for each in begun]
    assert expected({"a": "3", "b": "3"}, own[1], own[0]) == {"a": "3", "b": "3"}
    assert expected({}, own[1], own[0]) == {}
