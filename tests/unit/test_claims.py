"""Published claims: their speed-ups by hand, the settings as the sources state them, and that the page is current."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from claims_page import claims_chart, pages
from phalanx.hardware import cluster
from published.claims import BERT, CLAIMS, GOYAL, Claim, Point, Speed
from published.settings import NETWORKS, Curve, Model, Setting, profile

SETTINGS = [setting for claim in CLAIMS for setting in claim.settings]
SMALL = Setting(name="AlexNet", model="alexnet", device="P100-PCIe", per_node=4, counts=(1, 4, 8), share=64)


@pytest.fixture(scope="module")
def curve() -> Curve:
    return Curve.of(SMALL)


def test_page_and_chart_are_current() -> None:
    behind = [path.name for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    assert behind == [], "behind the code, or forecasts have changed\n    try: python tools/claims_page.py"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.title)
def test_what_is_stated_belongs_to_a_forecast(claim: Claim) -> None:
    assert all(point.setting in claim.settings and point.devices in point.setting.counts for point in claim.points)
    assert all(0 < point.efficiency <= 1 for point in claim.points)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.model} on {setting.device}")
def test_clusters_have_as_many_devices_as_asked(setting: Setting) -> None:
    assert [cluster(setting.place(count)).devices for count in setting.counts] == list(setting.counts)


class TestCurve:
    def test_speed_up_is_of_throughput(self, curve: Curve) -> None:
        one, _, eight = curve.forecasts
        assert curve.speed_up(8) == pytest.approx(8 * one.step / eight.step)
        assert curve.efficiency(8) == pytest.approx(one.step / eight.step)
        assert curve.efficiency(1) == 1

    def test_range_holds_the_efficiency(self, curve: Curve) -> None:
        low, high = curve.range(8)
        assert low < curve.efficiency(8) < high

    def test_share_grows_with_devices_and_a_fixed_batch_does_not(self) -> None:
        assert [SMALL.samples(count) for count in (1, 8)] == [64, 512]
        assert {BERT.settings[0].samples(count) for count in BERT.settings[0].counts} == {65536}

    def test_nodes_fill_up_first(self) -> None:
        assert [SMALL.place(count) for count in SMALL.counts] == ["1x1xP100-PCIe", "1x4xP100-PCIe", "2x4xP100-PCIe"]


class TestStated:
    def test_efficiency_is_over_the_first_count(self) -> None:
        assert Point(setting=GOYAL.settings[0], devices=256, speed_up=28.8, source="").efficiency == pytest.approx(0.9)

    def test_hours_of_a_training(self) -> None:
        hours = Speed(
            setting=GOYAL.settings[0], devices=8, stated="", value=1, samples=256 * 3600, unit=3600, word="hours"
        )
        assert hours.of_step(0.5) == pytest.approx(0.5)

    def test_samples_per_second(self) -> None:
        assert Speed(setting=SMALL, devices=8, stated="", value=1, word="images/s").of_step(0.5) == pytest.approx(1024)


@pytest.mark.parametrize(
    ("model", "parameters", "operations"),
    [
        ("alexnet", 61_100_840, 0.714e9),
        ("vgg16", 138_357_544, 15.47e9),
        ("resnet50", 25_557_032, 4.09e9),
        ("resnet101", 44_549_160, 7.80e9),
    ],
)
def test_networks_have_the_published_size(model: Model, parameters: int, operations: float) -> None:
    found = profile(model)
    assert found.parameters == parameters
    # a multiplication and an addition each, forward and twice backward; the image itself needs no gradient
    assert found.flops(1) == pytest.approx(6 * operations, rel=0.05)


def test_every_network_is_forecast() -> None:
    assert set(NETWORKS) <= {setting.model for setting in SETTINGS}


def test_chart_draws_every_point(curve: Curve) -> None:
    curves = [Curve(setting=setting, forecasts=curve.forecasts[:1] * len(setting.counts)) for setting in SETTINGS]
    drawn: Any = ElementTree.fromstring(claims_chart(curves))
    circles = drawn.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len([one for one in circles if len(one)]) == sum(len(claim.points) for claim in CLAIMS)
