import pytest

from pykvq import InvalidArgumentError
from pykvq.sampling import SamplingParams


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1"),
        ({"min_p": -1}, "min_p"),
        ({"typical_p": 2}, "typical_p"),
        ({"repeat_penalty": 0}, "repeat_penalty must be above 0"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"mirostat_mode": 3}, "mirostat_mode must be 0"),
        ({"top_k": 2**40}, "top_k"),
        ({"logit_bias": {-3: 1.0}}, r"logit_bias\[-3\]"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias\[3\]"),
    ],
)
def test_values_out_of_range(values, text):
    with pytest.raises(InvalidArgumentError, match=text):
        SamplingParams(**values)


def test_the_limits_are_allowed():
    params = SamplingParams(temperature=0, top_p=0, min_p=1, top_k=-1, logit_bias={5: float("-inf")})
    assert params.native_fields()["temperature"] == 0
