"""See the package."""

JsonSchemaValue = object
