"""The tables of the tuning database, as SQLAlchemy 2 models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Dialect, Double, ForeignKey, Index, String, Text, TypeDecorator, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship


class UTCDateTime(TypeDecorator[datetime]):
    """An aware UTC time, stored as a naive one: SQLite keeps no zone, and PostgreSQL would convert it."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value.astimezone(UTC).replace(tzinfo=None) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None else None


class Base(DeclarativeBase):
    """Base of every table."""

    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it as a plain class attribute)
        datetime: UTCDateTime,
        float: Double,
        dict[str, Any]: JSON(none_as_null=True),
        list[float]: JSON(none_as_null=True),
        list[str]: JSON(none_as_null=True),
    }


class SchemaRow(Base):
    """The one row that says whose database this is and which schema it has."""

    __tablename__ = "tilewright_schema"

    id: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int]


class EnvironmentRow(Base):
    """One `Environment`; `key` is its digest."""

    __tablename__ = "environments"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(32), unique=True)
    device: Mapped[str] = mapped_column(String(300), index=True)
    arch: Mapped[str] = mapped_column(String(64))
    record: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class ProblemRow(Base):
    """One `Problem`; `key` is its digest, `record` all of it, the rest is for queries by hand."""

    __tablename__ = "problems"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str] = mapped_column(Text)
    operation: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(64), index=True)
    dtype: Mapped[str] = mapped_column(String(16))
    head_dim: Mapped[int]
    batch: Mapped[int]
    num_heads: Mapped[int]
    num_kv_heads: Mapped[int]
    seqlen_q: Mapped[int]
    seqlen_kv: Mapped[int]
    mask_terms: Mapped[list[str]]
    mask_structure: Mapped[str] = mapped_column(Text)
    density: Mapped[float | None]
    record: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class VariantRow(Base):
    """One `VariantSpec`; `key` is its digest."""

    __tablename__ = "variants"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(32), unique=True)
    family: Mapped[str] = mapped_column(String(64), index=True)
    mask_form: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(Text)
    record: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class MeasurementRow(Base):
    """One `Measurement`; never changed once written. `uid` makes merging databases safe."""

    __tablename__ = "measurements"
    __table_args__ = (Index("ix_measurements_environment_problem", "environment_id", "problem_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = mapped_column(String(32), unique=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"), index=True)
    variant_id: Mapped[int | None] = mapped_column(ForeignKey("variants.id"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    outcome: Mapped[str] = mapped_column(String(16))
    time_us: Mapped[float | None]
    times_us: Mapped[list[float]]
    compile_s: Mapped[float | None]
    max_error: Mapped[float | None]
    rms_error: Mapped[float | None]
    registers: Mapped[int | None]
    smem_bytes: Mapped[int | None]
    message: Mapped[str] = mapped_column(Text)
    run_id: Mapped[str] = mapped_column(String(64))
    kernel_digest: Mapped[str] = mapped_column(String(64))
    baseline: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(index=True)

    environment: Mapped[EnvironmentRow] = relationship(lazy="joined", innerjoin=True)
    problem: Mapped[ProblemRow] = relationship(lazy="joined", innerjoin=True)
    variant: Mapped[VariantRow | None] = relationship(lazy="joined")


class WinnerRow(Base):
    """The one `Winner` of an environment and a problem; replaced when tuned again."""

    __tablename__ = "winners"
    __table_args__ = (UniqueConstraint("environment_id", "problem_id", name="uq_winners_environment_problem"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"), index=True)
    variant_id: Mapped[int] = mapped_column(ForeignKey("variants.id"))
    # The measurement's uid, not its id: a winner may be imported without the measurements behind it.
    measurement_uid: Mapped[str | None] = mapped_column(String(32))
    time_us: Mapped[float]
    default_time_us: Mapped[float | None]
    baseline_name: Mapped[str] = mapped_column(String(64))
    baseline_time_us: Mapped[float | None]
    verified: Mapped[bool]
    created_at: Mapped[datetime]

    environment: Mapped[EnvironmentRow] = relationship(lazy="joined", innerjoin=True)
    problem: Mapped[ProblemRow] = relationship(lazy="joined", innerjoin=True)
    variant: Mapped[VariantRow] = relationship(lazy="joined", innerjoin=True)
