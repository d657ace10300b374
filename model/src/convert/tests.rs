use std::collections::BTreeMap;

use super::*;
use crate::tiny::{Preset, TinyOptions, write_checkpoint};
use shimmer_kernels::WeightFormat;

fn options(source: &Path, out: &Path, class: NumericClass) -> ConvertOptions {
    ConvertOptions {
        source: source.to_path_buf(),
        out: out.to_path_buf(),
        class,
        name: Some("tiny".to_owned()),
    }
}

#[test]
fn every_family_converts_in_every_format() {
    for preset in Preset::ALL {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("checkpoint");
        write_checkpoint(preset, &TinyOptions::default(), &source).unwrap();
        for &format in WeightFormat::ALL {
            let out = directory.path().join(format.name());
            let report =
                convert(&options(&source, &out, NumericClass::uniform(format)), &()).unwrap();
            let container = Container::open(&out).unwrap();
            assert_eq!(container.digest(), report.digest);
            let trunk = container.trunk().unwrap();
            assert_eq!(trunk.vector("norm").unwrap().len(), container.config().hidden_size);
            for (layer, experts) in container.config().moe_layers() {
                let mut slab = vec![0; container.expert_layout(layer).unwrap().slab_bytes()];
                for expert in 0..experts {
                    container.read_expert(layer, expert, &mut slab).unwrap();
                }
            }
            let verified = crate::verify(&out, &()).unwrap();
            assert_eq!(verified.faults, Vec::<String>::new());
        }
    }
}
