"""What is said of a field: read from the source when somebody asks, not in each import."""

from __future__ import annotations

from pydantic import Field, create_model

from zoo.config.section import Section, descriptions_of


class Base(Section):
    """A base."""

    first: int = 0
    """One line."""
    second: int = Field(default=0, description="What the field itself says.")
    """What stands below it."""
    silent: int = 0


class Derived(Base):
    """A section of it."""

    first: int = 1
    """Said
    anew."""
    third: int = 0
    """Own."""


def test_a_string_below_a_field_describes_it_and_the_last_class_wins() -> None:
    """`description` wins over the string; what says nothing has no entry."""
    assert descriptions_of(Base) == {"first": "One line.", "second": "What the field itself says."}
    assert descriptions_of(Derived) == {
        "first": "Said\nanew.", "second": "What the field itself says.", "third": "Own.",
    }  # fmt: skip


def test_the_schema_says_it() -> None:
    """By the key's name and by its aliases."""

    class Aliased(Section):
        """In a function: its source is indented."""

        size: int = Field(default=0, alias="stage3_size")
        """Elements."""

    properties = Aliased.model_json_schema(by_alias=False)["properties"]
    assert properties["size"]["description"] == "Elements."
    assert properties["stage3_size"]["description"] == "Another name of size."


def test_a_class_without_source_has_what_its_fields_say() -> None:
    """A program made it."""
    made = create_model("Made", __base__=Section, size=(int, Field(default=0, description="Elements.")), other=(int, 0))
    assert descriptions_of(made) == {"size": "Elements."}


def test_no_import_reads_sources() -> None:
    """pydantic would, for each class."""
    assert not Section.model_config.get("use_attribute_docstrings", False)
