"""A registry in an S3-compatible bucket. Needs the extra `s3`."""
