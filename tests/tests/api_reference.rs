//! docs/API.md says what the .proto files say.

use std::{collections::BTreeMap, fmt::Write as _, path::PathBuf};

use prost::Message as _;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto,
    FileDescriptorSet, ServiceDescriptorProto, field_descriptor_proto::Label,
};

/// What clients and operators call. The protocol between members has no users outside.
const PACKAGES: [&str; 2] = ["shimmer.v1", "shimmer.admin.v1"];

const HEAD: &str = "# API reference

Made from the comments of [the .proto files](../proto/proto/shimmer) by `SHIMMER_TEST_WRITE=1 ./test api_reference`; without the variable the same \
test compares. Streams, retries and the codes of errors in context: [CLUSTER](CLUSTER.md). Reflection is on, so `grpcurl` and the like need no files.
";

/// Numbers of fields in descriptor.proto, which make up the paths of comments.
mod path {
    pub(super) const MESSAGES: i32 = 4;
    pub(super) const ENUMS: i32 = 5;
    pub(super) const SERVICES: i32 = 6;
    pub(super) const FIELDS: i32 = 2;
    pub(super) const VALUES: i32 = 2;
    pub(super) const METHODS: i32 = 2;
    pub(super) const NESTED_MESSAGES: i32 = 3;
    pub(super) const NESTED_ENUMS: i32 = 4;
}

/// One file and its comments by path.
struct Reference<'a> {
    package: &'a str,
    comments: BTreeMap<&'a [i32], String>,
    text: String,
}

impl Reference<'_> {
    fn comment(&self, path: &[i32]) -> &str {
        self.comments.get(path).map_or("", String::as_str)
    }

    fn paragraph(&mut self, path: &[i32]) {
        let comment = self.comment(path).to_owned();
        if !comment.is_empty() {
            write!(self.text, "{comment}\n\n").unwrap();
        }
    }

    /// A type's name without its own package.
    fn short<'n>(&self, name: &'n str) -> &'n str {
        let name = name.trim_start_matches('.');
        name.strip_prefix(self.package).map_or(name, |rest| rest.trim_start_matches('.'))
    }

    fn service(&mut self, service: &ServiceDescriptorProto, at: &[i32]) {
        write!(self.text, "### {}.{}\n\n", self.package, service.name()).unwrap();
        self.paragraph(at);
        self.text.push_str("| call | request | response | |\n|---|---|---|---|\n");
        for (number, method) in service.method.iter().enumerate() {
            let stream = |on: bool| if on { "stream of " } else { "" };
            let line = format!(
                "| `{}` | {}`{}` | {}`{}` | {} |",
                method.name(),
                stream(method.client_streaming()),
                self.short(method.input_type()),
                stream(method.server_streaming()),
                self.short(method.output_type()),
                self.comment(&[at, &[path::METHODS, index(number)]].concat())
            );
            writeln!(self.text, "{line}").unwrap();
        }
        self.text.push('\n');
    }

    fn message(&mut self, message: &DescriptorProto, outer: &str, at: &[i32]) {
        let name = format!("{outer}{}", message.name());
        write!(self.text, "#### {name}\n\n").unwrap();
        self.paragraph(at);
        if message.field.is_empty() {
            self.text.push_str("No fields.\n\n");
        } else {
            self.text.push_str("| field | number | type | |\n|---|---|---|---|\n");
            for (number, field) in message.field.iter().enumerate() {
                let line = format!(
                    "| `{}` | {} | {} | {} |",
                    field.name(),
                    field.number(),
                    self.kind(message, field),
                    self.comment(&[at, &[path::FIELDS, index(number)]].concat())
                );
                writeln!(self.text, "{line}").unwrap();
            }
            self.text.push('\n');
        }
        let inner = format!("{name}.");
        for (number, nested) in message.nested_type.iter().enumerate() {
            let entry = nested.options.as_ref().is_some_and(|options| options.map_entry());
            if !entry {
                let path = [at, &[path::NESTED_MESSAGES, index(number)]].concat();
                self.message(nested, &inner, &path);
            }
        }
        for (number, nested) in message.enum_type.iter().enumerate() {
            self.enumeration(nested, &inner, &[at, &[path::NESTED_ENUMS, index(number)]].concat());
        }
    }

    fn enumeration(&mut self, values: &EnumDescriptorProto, outer: &str, at: &[i32]) {
        write!(self.text, "#### {outer}{}\n\n", values.name()).unwrap();
        self.paragraph(at);
        self.text.push_str("| value | number | |\n|---|---|---|\n");
        for (number, value) in values.value.iter().enumerate() {
            let comment = self.comment(&[at, &[path::VALUES, index(number)]].concat());
            let line = format!("| `{}` | {} | {comment} |", value.name(), value.number());
            writeln!(self.text, "{line}").unwrap();
        }
        self.text.push('\n');
    }

    /// The type of a field as the .proto file writes it.
    fn kind(&self, message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
        let of = |field: &FieldDescriptorProto| match field.type_name.as_deref() {
            Some(name) => self.short(name).to_owned(),
            None => field.r#type().as_str_name().trim_start_matches("TYPE_").to_lowercase(),
        };
        let entry = message.nested_type.iter().find(|nested| {
            let map = nested.options.as_ref().is_some_and(|options| options.map_entry());
            map && field.type_name().ends_with(&format!(".{}", nested.name()))
        });
        if let Some(entry) = entry {
            return format!("`map<{}, {}>`", of(&entry.field[0]), of(&entry.field[1]));
        }
        let kind = of(field);
        if field.label() == Label::Repeated {
            format!("`repeated {kind}`")
        } else if field.proto3_optional() {
            format!("`optional {kind}`")
        } else if let Some(one) = field.oneof_index {
            let one = usize::try_from(one).unwrap();
            format!("`{kind}`, one of `{}`", message.oneof_decl[one].name())
        } else {
            format!("`{kind}`")
        }
    }
}

fn index(number: usize) -> i32 {
    i32::try_from(number).unwrap()
}

fn render(file: &FileDescriptorProto) -> String {
    let locations = file.source_code_info.iter().flat_map(|info| &info.location);
    let comments = locations.map(|location| {
        let lines = location.leading_comments().lines().map(str::trim);
        let text = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
        (location.path.as_slice(), text.replace('|', "\\|"))
    });
    let mut reference =
        Reference { package: file.package(), comments: comments.collect(), text: String::new() };
    write!(reference.text, "\n## {}\n\n", file.package()).unwrap();
    for (number, service) in file.service.iter().enumerate() {
        reference.service(service, &[path::SERVICES, index(number)]);
    }
    for (number, message) in file.message_type.iter().enumerate() {
        reference.message(message, "", &[path::MESSAGES, index(number)]);
    }
    for (number, values) in file.enum_type.iter().enumerate() {
        reference.enumeration(values, "", &[path::ENUMS, index(number)]);
    }
    reference.text.trim_end().to_owned() + "\n"
}

#[test]
fn api_reference_is_up_to_date() {
    let set = FileDescriptorSet::decode(shimmer_proto::FILE_DESCRIPTOR_SET).unwrap();
    let mut text = HEAD.to_owned();
    for package in PACKAGES {
        let file = set.file.iter().find(|file| file.package() == package);
        text.push_str(&render(file.unwrap_or_else(|| panic!("no package {package}"))));
    }
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/API.md");
    if std::env::var_os("SHIMMER_TEST_WRITE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = found.lines().zip(text.lines()).find(|(found, wanted)| found != wanted);
    assert!(
        found == text,
        "docs/API.md is not what the .proto files say, first at {differs:?}; \
         write it anew with SHIMMER_TEST_WRITE=1 ./test api_reference"
    );
}
