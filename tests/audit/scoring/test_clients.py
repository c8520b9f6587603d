"""Accuracy of clients: on test examples as each client's own are."""

import math

import pytest
import torch

from leakbench.audit.scoring.clients import client_accuracies, score_clients

LABELS = torch.tensor([0, 0, 0, 0, 1, 1])
RIGHT = torch.tensor([True, True, True, False, True, False])  # 3/4 of class 0, 1/2 of class 1


def test_it_is_the_mean_of_class_accuracies_in_the_clients_histogram():
    histograms = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    assert client_accuracies(RIGHT, LABELS, histograms).tolist() == [0.75, 0.5, 0.625]


def test_with_the_histogram_of_the_test_set_it_is_the_accuracy():
    histogram = torch.bincount(LABELS).double()[None] / len(LABELS)
    assert client_accuracies(RIGHT, LABELS, histogram).item() == pytest.approx(RIGHT.double().mean().item())


def test_classes_without_a_test_example_are_left_out():
    histograms = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)
    known, unknown = client_accuracies(RIGHT, LABELS, histograms).tolist()
    assert known == 0.75 and math.isnan(unknown)


def test_worst_and_spread_are_over_clients_whose_accuracy_is_known():
    scores = score_clients(torch.tensor([0.5, 0.9, math.nan], dtype=torch.float64))
    assert scores["worst_client_accuracy"].value == 0.5 and scores["worst_client_accuracy"].n == 2
    assert scores["client_accuracy_std"].value == pytest.approx(0.2)
    assert score_clients(torch.tensor([math.nan]))["worst_client_accuracy"].reason
