"""Every image that a page shows is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IMAGES = [
    (page.name, page.parent / link)
    for page in PAGES
    for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
    if "://" not in link
]


@pytest.mark.parametrize(("page", "image"), IMAGES)
def test_an_image_that_a_page_shows_is_there(page, image):
    assert image.is_file(), f"{page} shows {image.name}"


def test_pages_show_images():
    assert {"overlap.svg", "scale.svg", "step.svg"} <= {image.name for _, image in IMAGES}
