// Two models in one program, each in a thread of its own, continue the same token ids.
//
// The models were compiled with --prefix first_ and --prefix second_: their functions begin with it,
// their types are the same. See CMakeLists.txt for how it is built.
#include "first/model.h"
#include "second/model.h"

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

// The functions of one library.
struct Api {
    decltype(&first_bsm_open) open;
    decltype(&first_bsm_close) close;
    decltype(&first_bsm_session_create) create;
    decltype(&first_bsm_session_destroy) destroy;
    decltype(&first_bsm_prefill) prefill;
    decltype(&first_bsm_decode) decode;
    decltype(&first_bsm_sample) sample;
    const char *abi_hash;
};

const Api FIRST = {first_bsm_open,    first_bsm_close,  first_bsm_session_create,
                   first_bsm_session_destroy, first_bsm_prefill, first_bsm_decode,
                   first_bsm_sample,  FIRST_ABI_HASH};
const Api SECOND = {second_bsm_open,    second_bsm_close,  second_bsm_session_create,
                    second_bsm_session_destroy, second_bsm_prefill, second_bsm_decode,
                    second_bsm_sample,  SECOND_ABI_HASH};

// A status as an exception, a handle that is given back by itself.
void check(bsm_status status, const bsm_error &error) {
    if (status != BSM_OK) throw std::runtime_error(error.message);
}

class Conversation {
  public:
    Conversation(const Api &api, const std::string &path) : api_(api) {
        bsm_options options = {};
        options.threads = 1;
        options.abi_hash = api.abi_hash;
        bsm_error error;
        bsm_model *model;
        check(api.open(path.c_str(), &options, &model, &error), error);
        model_ = Handle<bsm_model>(model, api.close);
        bsm_session *session;
        check(api.create(model, &session, &error), error);
        session_ = Handle<bsm_session>(session, api.destroy);
    }

    std::vector<std::int32_t> continued(const std::vector<std::int32_t> &prompt, int count) {
        bsm_error error;
        std::vector<std::int32_t> found;
        auto length = static_cast<std::int64_t>(prompt.size());
        check(api_.prefill(session_.get(), prompt.data(), length, &error), error);
        while (static_cast<int>(found.size()) < count) {
            std::int32_t id;
            check(api_.sample(session_.get(), nullptr, &id, &error), error);
            found.push_back(id);
            check(api_.decode(session_.get(), id, &error), error);
        }
        return found;
    }

  private:
    template <typename T> using Handle = std::unique_ptr<T, void (*)(T *)>;
    const Api &api_;
    Handle<bsm_model> model_{nullptr, nullptr};
    Handle<bsm_session> session_{nullptr, nullptr};
};

} // namespace

int main(int count, char **words) {
    const int wanted = 8;
    if (count < 4) {
        std::cerr << "usage: " << words[0] << " FIRST_FOLDER SECOND_FOLDER ID [ID ...]\n";
        return 2;
    }
    std::vector<std::int32_t> prompt;
    for (int i = 3; i < count; i++) prompt.push_back(std::atoi(words[i]));

    const Api *apis[] = {&FIRST, &SECOND};
    std::vector<std::int32_t> answers[2];
    std::exception_ptr failures[2];
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; i++)
        threads.emplace_back([&, i] {
            try {
                answers[i] = Conversation(*apis[i], words[1 + i]).continued(prompt, wanted);
            } catch (...) {
                failures[i] = std::current_exception();
            }
        });
    for (auto &thread : threads) thread.join();

    for (int i = 0; i < 2; i++) {
        try {
            if (failures[i]) std::rethrow_exception(failures[i]);
        } catch (const std::exception &error) {
            std::cerr << words[1 + i] << ": " << error.what() << "\n";
            return 1;
        }
        for (std::int32_t id : answers[i]) std::cout << id << " ";
        std::cout << "\n";
    }
    return 0;
}
