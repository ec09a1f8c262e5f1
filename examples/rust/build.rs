//! Links the static library of the artifact that the environment variable MODEL names.

fn main() {
    let model = std::env::var("MODEL").expect("MODEL must be the folder of a compiled model");
    println!("cargo:rerun-if-env-changed=MODEL");
    println!("cargo:rerun-if-changed={model}/libmodel.a");
    println!("cargo:rustc-link-search=native={model}");
    println!("cargo:rustc-link-lib=static=model");
    println!("cargo:rustc-link-lib=m");
}
