"""Candidates as an attack gets them and as the auditor knows them."""

import pytest
import torch

from leakbench.attacks.core import Examples, MembershipScores
from leakbench.audit.targets.candidates import Candidates, copied, refuse_comparison, repeated_alone
from leakbench.defenses.core import keyed

PEOPLE = Examples(ids=torch.arange(100, 140), inputs=torch.rand(40, 3), labels=torch.arange(40) % 4)


def scored(ids, scores) -> MembershipScores:
    return MembershipScores(ids=torch.as_tensor(ids), scores=torch.as_tensor(scores, dtype=torch.float64), exact=False)


def test_an_attack_gets_copies_in_another_order_under_other_ids():
    drawn = Candidates.draw(PEOPLE, 5)
    assert torch.equal(drawn.given.ids, drawn.aliases) and (drawn.aliases.diff() > 0).all()
    assert not torch.isin(drawn.aliases, PEOPLE.ids).any()
    assert not torch.equal(drawn.ids, PEOPLE.ids) and torch.equal(drawn.ids.sort().values, PEOPLE.ids)
    assert torch.equal(drawn.given.inputs, PEOPLE.inputs[drawn.ids - 100])
    assert torch.equal(drawn.given.labels, PEOPLE.labels[drawn.ids - 100])
    for mine, given in ((PEOPLE.inputs, drawn.given.inputs), (drawn.aliases, drawn.given.ids)):
        assert mine.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def test_the_same_key_draws_the_same_and_another_key_another_order_and_other_ids():
    one, same, other = (Candidates.draw(PEOPLE, key) for key in (5, 5, 6))
    assert torch.equal(one.ids, same.ids) and torch.equal(one.aliases, same.aliases)
    assert not torch.equal(one.ids, other.ids) and not torch.isin(one.aliases, other.aliases).any()


def test_the_order_of_pools_shows_in_nothing_even_to_whoever_knows_the_key():
    drawn = Candidates.draw(PEOPLE, 5)
    turned = torch.arange(40).flip(0)
    again = Candidates.draw(
        Examples(ids=PEOPLE.ids[turned], inputs=PEOPLE.inputs[turned], labels=PEOPLE.labels[turned]), 5
    )
    assert torch.equal(again.ids, drawn.ids) and torch.equal(again.given.inputs, drawn.given.inputs)


def test_whoever_knows_the_key_learns_nothing_where_the_ids_of_members_are_the_lowest():
    """As of a test set that stands in for non-members: ranks of 20 of 40 have a mean of 19.5 and a deviation of 1.8."""
    coins = torch.Generator().manual_seed(3)
    means = []
    for key in range(20):
        people = Examples(ids=PEOPLE.ids, inputs=torch.rand(40, 3, generator=coins), labels=PEOPLE.labels)
        drawn = Candidates.draw(people, key)
        rank_before = torch.randperm(40, generator=keyed(key)).double()  # of the example that came at each place
        means.append(rank_before[drawn.ids < 120].mean())
    assert abs(float(torch.stack(means).mean()) - 19.5) < 5 * 1.85 / 20**0.5


def test_of_two_copies_whoever_knows_the_key_does_not_learn_which_has_the_lower_id():
    """As of a member that is in the test set again: of 400 pairs half are right by chance, with a deviation of 10."""
    coins, right = torch.Generator().manual_seed(3), 0
    for key in range(20):
        inputs = torch.rand(20, 3, generator=coins).repeat(2, 1)
        drawn = Candidates.draw(Examples(ids=PEOPLE.ids, inputs=inputs, labels=torch.zeros(40, dtype=torch.long)), key)
        first_of_two = torch.randperm(40, generator=keyed(key)) % 2 == 0
        right += int((first_of_two & (drawn.ids < 120)).sum())
    assert abs(right - 200) < 5 * 10


def test_places_and_ids_say_nothing_of_the_order_before():
    """Spearman's correlation of the order before with that after, over 200 keys: mean 0, standard error 0.011."""
    places = torch.arange(40).double()
    found = [
        torch.corrcoef(torch.stack([Candidates.draw(PEOPLE, key).ids.double(), places]))[0, 1] for key in range(200)
    ]
    assert abs(torch.stack(found).mean()) < 5 * 0.0113


def test_answers_come_back_under_the_ids_of_the_data_set():
    drawn = Candidates.draw(PEOPLE, 5)
    # A score that says who is meant, in an order of the attack's own, after it has written over what it was given.
    answer = scored(drawn.aliases.flip(0).clone(), drawn.ids.flip(0))
    drawn.given.ids.zero_()
    found = drawn.answers(answer)
    assert torch.equal(found.ids, PEOPLE.ids) and torch.equal(found.scores, PEOPLE.ids.double())


def test_answers_about_anybody_else_are_refused():
    drawn = Candidates.draw(PEOPLE, 5)
    with pytest.raises(ValueError, match="of the 40 candidates, each once, got 40: 40 are of no candidate"):
        drawn.answers(scored(PEOPLE.ids, torch.zeros(40)))  # the ids of the data set are not for attacks
    with pytest.raises(TypeError, match="must return MembershipScores, got dict"):
        drawn.answers({"ids": drawn.aliases})


def test_nobody_and_one_can_be_asked_about():
    nobody = Examples(ids=PEOPLE.ids[:0], inputs=PEOPLE.inputs[:0], labels=PEOPLE.labels[:0])
    assert len(Candidates.draw(nobody, 0)) == 0
    one = Examples(ids=PEOPLE.ids[:1], inputs=PEOPLE.inputs[:1], labels=PEOPLE.labels[:1])
    assert Candidates.draw(one, 0).ids.tolist() == [100]


def test_a_copy_of_public_examples_has_their_content_and_other_numbers():
    public = copied(PEOPLE)
    assert public.ids.tolist() == list(range(40)) and torch.equal(public.inputs, PEOPLE.inputs)
    public.inputs.zero_()
    assert PEOPLE.inputs.any()


def test_rounding_is_no_comparison_and_a_score_that_needs_the_others_is_one():
    together = scored([1, 2, 3], [1.0, 2.0, 30.0])
    refuse_comparison("one", together, scored([3], [30.001]))
    with pytest.raises(ValueError, match=r"one must score .* is 2 among the others and 30 alone"):
        refuse_comparison("one", together, scored([2], [30.0]))
    tied = scored([1, 2, 3], [0.0, 0.0, 0.0])
    refuse_comparison("one", tied, scored([2], [0.0]))


@pytest.mark.parametrize(("offset", "outlier"), [(0.0, 0.0), (1e9, 0.0), (2.0**52, 0.0), (0.0, 1e9)])
def test_a_comparison_is_found_whatever_the_scores_are_made_to_look_like(offset, outlier):
    decisions = [offset + (number < 50) for number in range(100)]
    decisions[7] += outlier
    together = scored([*range(100)], decisions)
    with pytest.raises(ValueError, match="must score a candidate by what is left without everybody else"):
        refuse_comparison("one", together, scored([3], [offset]))


def test_whoever_compares_a_few_candidates_alone_is_asked_where_that_pays():
    """One member in twenty is lifted above all non-members: a true positive rate of 5 % at no false alarm."""
    members, caught, drawn = torch.arange(400) < 200, 0, []
    for seed in range(200):
        coins = torch.Generator().manual_seed(seed)
        scores = torch.randn(400, generator=coins, dtype=torch.float64)
        lifted = torch.randperm(200, generator=coins)[:10]
        scores[lifted] += 9
        asked = repeated_alone(scores, members, coins)
        assert 2 <= len(asked) <= 4 and 1 <= int(members[asked].sum()) <= 2
        caught += bool(torch.isin(asked, lifted).any())
        drawn.append(asked)
    # Two members drawn from all would be one of them once in ten times; one of the surest tenth is, every second time.
    assert 80 <= caught <= 130
    # And everybody may be drawn.
    assert len(torch.cat(drawn).unique()) > 200


def test_of_one_member_and_one_non_member_both_are_asked():
    asked = repeated_alone(torch.tensor([0.0, 1.0]), torch.tensor([True, False]), torch.Generator())
    assert asked.tolist() == [0, 1]
    assert repeated_alone(torch.zeros(3), torch.tensor([True] * 3), torch.Generator()).numel() in (1, 2)
