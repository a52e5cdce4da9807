"""Spectral radii of matrices that are known."""

from __future__ import annotations

import math

import pytest
import torch

from tierload.heat.lanczos import PRODUCTS, TOLERANCE, spectral_radius

SPECTRA = {
    "one that stands out": [*torch.linspace(-1, 1, 99).tolist(), 8.0],
    "a negative one": [*torch.linspace(-1, 1, 99).tolist(), -8.0],
    "a and -a": [3.0, -3.0, *torch.linspace(-1, 1, 98).tolist()],
    "a and -a alone": [2.0, -2.0],
    "all the same": [5.0] * 40,
    "dense": torch.linspace(0, 4, 200).tolist(),
    "many decades": [10.0**-n for n in range(30)],
    "few that are not zero": [1.0, 0.5, *[0.0] * 98],
}


def matrix(spectrum: list[float]) -> torch.Tensor:
    torch.manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64))[0]
    return rotation @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ rotation.T


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_known_spectra(name: str, dtype: torch.dtype) -> None:
    spectrum = SPECTRA[name]
    known = matrix(spectrum).to(dtype)
    found, vector = spectral_radius(known.mv, torch.randn(len(spectrum), dtype=dtype))
    exact = max(map(abs, spectrum))
    assert found.value == pytest.approx(exact, rel=TOLERANCE)
    assert found.residual <= TOLERANCE * found.value
    assert found.products <= PRODUCTS
    assert torch.linalg.vector_norm(known.mv(vector)) == pytest.approx(exact, rel=2 * TOLERANCE)


def test_the_residual_bounds_the_error_when_products_run_out() -> None:
    spectrum = torch.linspace(0, 4, 200)
    known = matrix(spectrum.tolist())
    for most in range(1, 6):
        found, _ = spectral_radius(known.mv, torch.randn(200, dtype=torch.float64), most=most)
        assert found.products <= most
        assert float((spectrum - found.value).abs().min()) <= found.residual


def test_a_matrix_of_zeros_takes_one_product() -> None:
    found, _ = spectral_radius(torch.zeros_like, torch.randn(10))
    assert found == (0.0, 1, 0.0)


def test_one_dimension_is_exact() -> None:
    found, _ = spectral_radius(lambda vector: -3 * vector, torch.ones(1))
    assert found == (3.0, 1, 0.0)


def test_products_that_are_no_numbers_end_it() -> None:
    found, _ = spectral_radius(lambda vector: vector * math.nan, torch.randn(10))
    assert math.isnan(found.value)
